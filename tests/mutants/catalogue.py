"""Faults that could lose money, each as one replaced passage of the product's code.

A passage is found by its text, in whichever module it stands, and must occur once: a mutant
follows the code when that moves, and fails its own test when the code changes.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Mutant(NamedTuple):
    """A planted fault. ``why``: what goes wrong with money, or with what people were told.

    ``cut``: a scenario of ``tests/simulation/cuts.py`` that shows it at some effect. ``behind``:
    what holds the money without the passage, or why the simulation seldom shows it.
    """

    name: str
    why: str
    old: str
    new: str
    cut: str = ""
    behind: str = ""


MUTANTS: Final = (
    # --- the rules of an order -----------------------------------------------------------------
    Mutant(
        "underpaid-is-paid-in-full",
        "an order that is paid short gets what the whole amount brings",
        "    return order.terms.payout(units_by_rate(order.unspent, fresh), is_priced=is_priced)",
        "    came = sum(units_by_rate(order.unspent, fresh).values())\n"
        "    due = max(order.terms.deposit_amount, came)\n"
        "    return order.terms.payout({fresh: due}, is_priced=is_priced)",
        cut="short",
    ),
    Mutant(
        "overpaid-takes-reservations",
        "a payout above its quote takes what others were quoted",
        "    return claims.total - claims.above_quotes - order.terms.expected_output - transfer.fee\n",
        "    return claims.returnable\n",
        cut="overpaid",
    ),
    Mutant(
        "payout-takes-deposits",
        "a payout takes deposits of others, and their refunds wait",
        "        return claims.returnable\n",
        "        return 0\n",
        behind="an order reserves its payout beside all deposits that may go back: only where the "
        "wallet holds less than it did can a quoted payout reach them",
    ),
    Mutant(
        "overpaid-is-swapped",
        "a deposit over the maximum is swapped at the quoted rate",
        "    if total > order.terms.max_deposit:\n        return refund(order, OrderReason.ABOVE",
        "    if total > 99 * order.terms.max_deposit:\n        return refund(order, OrderReason.ABOVE",
        cut="refund-of-xmr",
    ),
    Mutant(
        "below-minimum-is-kept",
        "a deposit below the minimum is neither swapped nor refunded",
        "    return refund(order, OrderReason.BELOW_MINIMUM)",
        "    return Transition(replace(order, status=OrderStatus.EXPIRED))",
        cut="below-minimum",
    ),
    Mutant(
        "late-extra-is-kept",
        "a deposit that is confirmed after the decision is never refunded",
        "    return refund_extra(_record_confirmed(order, event))",
        "    return Transition(_record_confirmed(order, event))",
        cut="paid-again",
    ),
    Mutant(
        "removed-deposit-is-paid",
        "a payout stays planned although its deposit was taken back",
        "        return refund_extra(order)\n    return decide(cancel_planned(order), now)",
        "        return refund_extra(order)\n    return Transition(order)",
        cut="robbed-payout",
    ),
    Mutant(
        "failed-payout-is-not-refunded",
        "the deposits of a payout that failed stay spent",
        "    order = release(put(order, ended), transfer.transfer_id)",
        "    order = put(order, ended)",
        cut="banned",
    ),
    Mutant(
        "removed-refund-goes-on",
        "a refund is planned again with a deposit that is gone",
        "    return refund_extra(remove_deposit(order, event))",
        "    return refund_extra(order)",
        cut="robbed-refund",
    ),
    # --- commit, then act ----------------------------------------------------------------------
    Mutant(
        "effects-are-forgotten",
        "after a restart a committed payout is not carried out",
        "        for effect in pending:\n            self._push(effect",
        "        for effect in pending[:0]:\n            self._push(effect",
        cut="payout-of-usdc",
    ),
    Mutant(
        "effect-ends-too-soon",
        "a transfer whose outcome is unknown is never looked at again",
        "    ended = verdict.outcome in (Outcome.SETTLED, Outcome.FAILED)",
        "    ended = verdict.outcome is not Outcome.PENDING",
        cut="unanswered",
    ),
    Mutant(
        "unknown-is-failed",
        "a payout whose publication raised an error is refunded as well",
        "        return Verdict(Outcome.UNKNOWN, type(error).__name__)",
        "        return Verdict(Outcome.FAILED, type(error).__name__)",
        cut="unanswered",
    ),
    Mutant(
        "effects-are-not-committed",
        "a crash after a decision loses the payout that was decided",
        "effect_values(order_id, effect)) for effect in change.effects",
        "effect_values(order_id, effect)) for effect in change.effects[:0]",
        cut="payout-of-usdc",
    ),
    Mutant(
        "key-is-not-looked-up",
        "the same idempotency key makes a second order",
        "        if stored is not None:\n            require_same(stored.operation",
        "        if stored is not None and stored.body == b'':\n            require_same(stored.operation",
        cut="payout-of-usdc",
    ),
    Mutant(
        "deposit-is-not-asked-again",
        "a payout is signed for a deposit that the chain has lost",
        "        return await self._has_its_deposits(order)",
        "        return True",
        cut="robbed-payout",
    ),
    Mutant(
        "scan-before-the-resume-is-enough",
        "after a pause a payout is signed for a deposit that a deep branch has taken meanwhile",
        "        if not all(self._progress.is_current(key.network) for key in keys):",
        "        if not keys:",
        cut="resumed",
    ),
    Mutant(
        "signed-is-not-checked-again",
        "what changed while a payment was signed is paid anyway",
        "            if check is not None:\n                await check(",
        "            if check is not None and not steps:\n                await check(",
        behind="a cancelled transfer can't become a signed one (machine.py), and writes are fenced; "
        "what is left is the moment between a scan that misses a deposit and its event",
    ),
    Mutant(
        "recorded-before-acknowledged",
        "a deposit whose event failed is acknowledged all the same",
        "            if not self.quarantine.is_broken(order_id, step):",
        "            if True:",
        behind="an event fails by a fault of the product only, which no universe has",
    ),
    Mutant(
        "early-deposit-counts-as-final",
        "what is paid for deposits that are not final has no bound",
        "            return DepositConfirmed(event.key, is_final=False)",
        "            return event",
        cut="early",
    ),
    Mutant(
        "sum-at-risk-is-not-checked",
        "orders that are confirmed at once pay out more than the bound together",
        "            yield Statement(_WITHIN, bound, finds=True)",
        "            yield Statement(_WITHIN, bound)",
        cut="early",
        behind="the sum is read before each event (may_count), and one settler applies one at a time",
    ),
    # --- leases --------------------------------------------------------------------------------
    Mutant(
        "write-without-fence",
        "a replica that has lost its lease goes on writing",
        "            await self._db.write([self._fence, *statements])",
        "            await self._db.write([*statements])",
        cut="cut-off",
    ),
    Mutant(
        "lease-is-taken-early",
        "two replicas hold the lease at once",
        "(expires_at IS NULL OR expires_at <= now_ms() OR token = :over)",
        "(expires_at IS NULL OR expires_at <= now_ms() + 9000 OR token = :over)",
        cut="contested",
    ),
    Mutant(
        "lease-lasts-longer",
        "a replica signs after its lease has ended",
        "self._now_ms() < self._ends_at - MARGIN_MS",
        "self._now_ms() < self._ends_at + 60_000",
        cut="paused",
    ),
    Mutant(
        "lease-counts-from-the-answer",
        "a slow answer of the database makes a lease longer",
        "            lease.extend(asked_at + lasts_ms)",
        "            lease.extend(self._now_ms() + lasts_ms)",
        cut="slow",
    ),
    Mutant(
        "published-without-lease",
        "a replica publishes although its lease has no time left",
        "        if publishes and not self._has_time():",
        "        if publishes and self._session is None:",
        cut="paused",
    ),
    # --- USDC payments -------------------------------------------------------------------------
    Mutant(
        "nonce-of-the-node",
        "a signed and unpublished payment's nonce is signed for another",
        "        return max(pending, own)",
        "        return pending",
        cut="forgetful",
    ),
    Mutant(
        "unpublished-is-passed",
        "a payout is signed behind one that no node may ever get",
        "                return payment.payment_id\n        return None",
        "                continue\n        return None",
        behind="what was just signed goes out at once, and later with each payout that is signed"
        " after it, lowest nonce first; tests/unit/test_onchain_evm_payments.py has it",
    ),
    Mutant(
        "published-before-recorded",
        "a payment may be out there without a line that says so",
        "            await self._mark_published(unknown)\n",
        "            asyncio.get_running_loop().create_task(self._mark_published(unknown))\n",
        cut="payout-of-usdc",
    ),
    Mutant(
        "nonce-is-used-twice",
        "two payouts that are signed together have one nonce",
        "            made = self.attempt(order, nonce + len(payments), price)\n",
        "            made = self.attempt(order, nonce, price)\n",
        cut="payouts-of-usdc",
    ),
    Mutant(
        "ether-is-counted-once",
        "payouts that are signed together each count on the same ether",
        "        fit = sum(wei + reserve <= moment.ether for wei in needed)\n",
        "        fit = len(needed) if needed[0] + reserve <= moment.ether else 0\n",
        cut="little-ether",
    ),
    Mutant(
        "usdc-is-counted-once",
        "payouts that are signed together each count on the same USDC",
        "self._payable(found, funds.after(orders), kept)",
        "self._payable(found, funds, kept)",
        cut="little-usdc",
    ),
    Mutant(
        "batch-has-one-line",
        "of payouts that are signed together the journal has the first one only",
        "            as_one(entries),\n",
        "            entries[0],\n",
        cut="restored-batch",
    ),
    Mutant(
        "older-copy-takes-payments",
        "a database that has lost payments takes them once more from a settler that runs",
        'it is known to have none."""\n        return self._mark\n',
        'it is known to have none."""\n        return None\n',
        cut="fail-over",
    ),
    Mutant(
        "replacement-is-not-recorded",
        "an attempt with higher fees is published and not on record",
        "        await self._ledger.add_attempt(payment, attempt)",
        "        payment = replace(payment, attempts=(*payment.attempts, attempt))\n"
        "        await self._payments.hand_over([payment])",
        cut="dear",
    ),
    Mutant(
        "settled-by-one-block",
        "a payout counts as final in a block that may be replaced",
        "        needed = self._network.settled_after\n",
        "        needed = 1\n",
        cut="payout-of-usdc",
    ),
    Mutant(
        "failed-by-one-block",
        "a payout is refunded for a failure in a block that may be replaced",
        "        if depth < needed or _is_paid(after):",
        "        if depth < 1 or _is_paid(after):",
        cut="displaced",
    ),
    Mutant(
        "receipt-is-not-asked-again",
        "a payout mined between two questions counts as displaced",
        "        if receipt is not None:\n            return await self._mined(payment, receipt, top)\n"
        "        return await self._spent_nonce(payment, since, top)",
        "        return await self._spent_nonce(payment, since, top)",
        behind="the spender of the nonce is looked for, and found to be the payment itself",
    ),
    Mutant(
        "spent-nonce-is-failed",
        "a payout whose nonce is spent counts as failed without a proof",
        "            return self._open(after, why, depth)\n        if found.is_attempt_of(payment):",
        "            return Judgement(Verdict(Outcome.FAILED, why), after)\n"
        "        if found.is_attempt_of(payment):",
        cut="pruned",
    ),
    Mutant(
        "owed-is-not-counted",
        "the same USDC is promised to two payouts",
        "        return sum(item.order.units for item in waiting if _is_payout(item))",
        "        return 0 * sum(item.order.units for item in waiting if _is_payout(item))",
        cut="little-usdc",
    ),
    Mutant(
        "any-event-settles",
        "a payment counts as paid by a transfer of something else",
        "            if log.address.lower() == token and"
        " usdc.transfer_in(log.topics, log.data) == wanted:",
        "            if log.address.lower() == token or wanted is None:",
        behind="what the wallet signs makes one transfer, or fails without an event",
    ),
    # --- USDC deposits and sweeps --------------------------------------------------------------
    Mutant(
        "usdc-confirmed-at-once",
        "a deposit counts before it has the confirmations",
        "    return height - number + 1 >= depth",
        "    return height - number + 1 >= 1",
        cut="payout-of-xmr",
    ),
    Mutant(
        "usdc-gone-at-once",
        "one node's missing receipt takes a deposit away",
        "            if txid in self._missing:\n                self._note_gone(scanned, txid)",
        "            if not listed:\n                self._note_gone(scanned, txid)",
        cut="late-index",
    ),
    Mutant(
        "usdc-block-is-not-compared",
        "a deposit in a replaced block is confirmed",
        "        return block is not None and block.hash == item.block_hash\n\n    def is_joined",
        "        return block is not None\n\n    def is_joined",
        behind="what is above the fork is compared by the events of blocks that are read again, and"
        " what is below is on the chain, unless a wrong block is on record;"
        " tests/unit/test_onchain_evm_deposits.py has it",
    ),
    Mutant(
        "usdc-branch-is-not-compared",
        "the cursor goes on from a block that was replaced, and a deposit below is never compared",
        "        return self if follows else replace(self, proven=None, follows=follows)",
        "        return self",
        cut="kept-branch",
    ),
    Mutant(
        "usdc-kept-branch-has-depth",
        "a deposit in a replaced block counts while one of several nodes keeps that block",
        "        return head.hash in (self.fork.hash, self.reached.hash)"
        " or head.parent == self.fork.hash",
        "        return True",
        cut="kept-branch",
    ),
    Mutant(
        "usdc-above-a-fork-counts",
        "a deposit above a fork counts before a scan has shown its block",
        "        return 0 if number is None or number > compared else max(0, height - number + 1)",
        "        return 0 if number is None else max(0, height - number + 1)",
        behind="the height is no higher than the fork until blocks above that are read",
    ),
    Mutant(
        "cursor-moves-on",
        "blocks whose deposits were not read are never read again",
        "        to = scanned.reached",
        "        to = EvmCursor(self._height, (await scanned.block(self._height)).hash)",
        cut="unread",
    ),
    # --- XMR payments --------------------------------------------------------------------------
    Mutant(
        "xmr-unpublished-is-passed",
        "the wallet signs with outputs of a payment that is not out",
        "            if verdict.outcome not in (Outcome.SETTLED, Outcome.PENDING, Outcome.FAILED):",
        "            if verdict.outcome is None:",
        cut="untaken",
    ),
    Mutant(
        "xmr-inputs-are-not-compared",
        "two payouts spend the same output, and one never arrives",
        "        if taken := await self._ledger.live_key_images(signed.key_images):",
        "        if taken := set[str]():",
        behind="what was signed is compared again before it is on record (_check), and the schema "
        "has each live key image once: without this the wallet is not told to spend others",
    ),
    Mutant(
        "xmr-relayed-before-recorded",
        "the wallet relays a payment that is not on record as out",
        "            await self._ledger.put_payment(marked)\n            said = await self._relay(marked)",
        "            said = await self._relay(marked)\n            await self._ledger.put_payment(marked)",
        cut="payout-of-xmr",
    ),
    Mutant(
        "xmr-settled-by-one-block",
        "an XMR payout counts as final in a block that may be replaced",
        "            and depth >= self._options.settled_after\n",
        "            and depth >= 1\n",
        cut="payout-of-xmr",
    ),
    Mutant(
        "xmr-payment-is-not-shown",
        "an XMR payout counts as final in a replaced block that one of several nodes keeps",
        "            and await self._connection.is_on_chain({found.txid: found.height}, info)\n",
        "",
        behind="it is published again, since nothing else has spent its inputs",
    ),
    Mutant(
        "xmr-failed-by-one-block",
        "an XMR payout counts as failed by a spender that may go again",
        "        if depth < needed or not await self._connection.is_on_chain(place, info):",
        "        if depth < 0:",
        behind="only somebody else with the wallet's keys spends its inputs otherwise",
    ),
    Mutant(
        "xmr-spent-is-failed",
        "an input spent in the chain counts as failure without its spender",
        "            await self._put(payment, replace(payment, height=None, conflict=since))\n"
        "            return Verdict(\n                Outcome.UNKNOWN,",
        "            await self._put(payment, replace(payment, height=None, conflict=since))\n"
        "            return Verdict(\n                Outcome.FAILED,",
        behind="only somebody else with the wallet's keys spends its inputs otherwise",
    ),
    Mutant(
        "xmr-absence-ends-a-payment",
        "an XMR payout that a late node and a restored wallet lack is called unminable, and is paid"
        " once more by hand",
        "        if not self._is_by_word:\n",
        "        if False:\n",
        behind="nobody pays by hand in the simulation; tests/unit/test_onchain_monero_gone.py has "
        "it",
    ),
    Mutant(
        "xmr-late-node-hides-a-payment",
        "a payment that is on no record, and that a late node and a restored wallet lack, is made"
        " once more",
        "        if off > NEWEST_BLOCK_MS and not self._mines_on_demand:",
        "        if False:",
        behind="no wallet is restored from its words in the simulation;"
        " tests/unit/test_onchain_startup_reconciliation.py has it",
    ),
    Mutant(
        "xmr-payments-since-the-scan",
        "a payment that is on no record is passed over, since the scan has gone on beyond it",
        "            self._since = max(await self._ledger.recorded_height() - _MARGIN, 0)",
        "            self._since = max((await self._ledger.scanned_height() or 0) - _MARGIN, 0)",
        behind="no wallet is restored from its words in the simulation;"
        " tests/unit/test_onchain_startup_reconciliation.py has it",
    ),
    Mutant(
        "xmr-closed-batch-frees-its-orders",
        "an order is refunded though a batch that was closed by word may still pay it",
        '    "  OR p.conflict_height IS NULL AND p.txid IN (SELECT txid FROM closed_by_hand)"\n'
        '    "  OR e.transfer_id',
        '    "  OR e.transfer_id',
        behind="the simulation restores no copy that lacks a transfer which was signed since;"
        " tests/unit/test_cli_close.py has it",
    ),
    Mutant(
        "xmr-signed-anew",
        "an absent XMR payout is signed again in place of published again",
        "        answer = await self._connection.node.submit(payment.raw)",
        "        again = await self._connection.wallet.prepare(\n"
        "            [(p.address, p.units) for p in payment.payees], priority=2, from_indices=()\n"
        "        )\n        await self._connection.wallet.relay(again.metadata)\n"
        "        answer = await self._connection.node.submit(payment.raw)",
        cut="unanswered",
    ),
    # --- XMR deposits --------------------------------------------------------------------------
    Mutant(
        "xmr-confirmed-at-once",
        "an XMR deposit counts before it has the confirmations",
        "        deep = stays or view.info.height - found.height >= needed",
        "        deep = stays or view.info.height - found.height >= 1",
        cut="early",
    ),
    Mutant(
        "xmr-fork-is-not-found",
        "blocks that were replaced are not scanned again",
        "                if hashes.get(cursor.height) == cursor.hash:",
        "                if cursor.height in hashes:",
        cut="branch",
    ),
    Mutant(
        "xmr-block-is-not-shown",
        "a deposit in a replaced block is confirmed while one of several nodes keeps that block",
        "        if not view.agreed or await self._connection.is_on_chain(rising, view.info):",
        "        if rising is not None:",
        cut="kept-branch-of-xmr",
    ),
    Mutant(
        "xmr-scan-needs-no-agreement",
        "the cursor moves although wallet and node differ",
        "        agreed = before.top_hash == after.top_hash and scanned == after.height and not stale",
        "        agreed = True",
        cut="unread",
    ),
)

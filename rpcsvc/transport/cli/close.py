"""``rpcsvc payouts close TRANSFER TXID --note TEXT``: the operator's signed word that it was paid.

For a restored database, where no key proves whom a transaction paid, or an order was paid otherwise
than the copy has it. The transfer is settled without a receipt and never signed for; the word is
kept with its signature. The service must not be running.
"""

from __future__ import annotations

import sys
from typing import Final

import orjson

from rpcsvc.clock import SystemClock
from rpcsvc.domain.effects import AdvanceTransfer
from rpcsvc.domain.events import TransferPrepared, TransferSettled
from rpcsvc.domain.money import format_units
from rpcsvc.domain.states import TransferState
from rpcsvc.ids import system_random
from rpcsvc.orders.processor import OrderProcessor
from rpcsvc.settlement.onchain.adoption import NotAdopted, Open, bare_txid
from rpcsvc.settlement.onchain.monero.ledger import NETWORK as MONERO
from rpcsvc.signing.key_files import KEYS_DIR
from rpcsvc.signing.key_ring import KeyRing
from rpcsvc.signing.response_signer import ResponseSigner
from rpcsvc.store.orders import SqliteOrderStore
from rpcsvc.store.sqlite import Database, Statement
from rpcsvc.transport.cli.adopt import find_transfer
from rpcsvc.transport.cli.context import FAILED, OK, Context, UsageError
from rpcsvc.transport.cli.operator import onchain_settings
from rpcsvc.transport.cli.owner import with_database

_ADD: Final = (
    "INSERT INTO closed_by_hand (transfer_id, txid, note, at, kid, signature)"
    " VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
)


def close(context: Context) -> int:
    """The command. Raises UsageError and Unreachable: nothing was changed."""
    settings, options = onchain_settings(context), context.options
    note = " ".join(options.note.split())
    if not note:
        raise UsageError("--note must say how you know that it was paid.")

    async def work(database: Database) -> Open:
        opened = find_transfer(database, options.transfer)
        prefix = "" if opened.transfer.network == MONERO else "0x"
        txid = bare_txid(options.txid.removeprefix("0x"), prefix)
        clock = SystemClock()
        ring = KeyRing.load_or_create(settings.data_dir / KEYS_DIR, clock, system_random)
        await _close(database, opened, txid, note, ResponseSigner(ring, clock))
        return opened

    try:
        done = with_database(settings, work).transfer
    except NotAdopted as refused:
        sys.stderr.write(f"rpcsvc: not closed: {refused}\n")
        return FAILED
    amount = f"{format_units(done.units, done.asset)} {done.asset.symbol}"
    sys.stdout.write(
        f"{done.transfer_id}: {amount}, paid as you say: {note}\nIt is not paid again. Once all"
        " that the transaction paid is closed: rpcsvc treasury explain\n"
    )
    return OK


async def _close(
    database: Database, opened: Open, txid: str, note: str, signer: ResponseSigner
) -> None:
    """Raises NotAdopted for a transfer that was signed, or is over."""
    name, state = opened.transfer.transfer_id, opened.transfer.state
    if state is not TransferState.PLANNED:
        raise NotAdopted(f"{name} is {state.value}: only what is planned can be closed by hand.")
    clock = SystemClock()
    at = clock.now_ms()
    word = orjson.dumps({"at": at, "note": note, "transfer": name, "txid": txid})
    # The word first: without it the audit would take the transfer for one that nobody paid.
    row = (name, txid, note, at, signer.kid, signer.vouch(word))
    await database.write([Statement(_ADD, row)])
    processor = OrderProcessor(SqliteOrderStore(database, lambda: ""), clock, lambda _order: None)
    await processor.apply(opened.order_id, TransferPrepared(name, txid, ""))
    effect = AdvanceTransfer(name)
    await processor.apply(opened.order_id, TransferSettled(name, None), done=(effect,))

# pragma version ~=0.4.3
# pragma evm-version paris
"""
A token with the interface of Circle's USDC, for tests: 6 decimals, EIP-2612, EIP-3009, pause and
blacklist. Whoever deploys it may mint, pause and blacklist. What the real one can do besides
(upgrades, minters with allowances, rescue) is not here.
"""

event Transfer:
    sender: indexed(address)
    receiver: indexed(address)
    value: uint256

event Approval:
    owner: indexed(address)
    spender: indexed(address)
    value: uint256

event AuthorizationUsed:
    authorizer: indexed(address)
    nonce: indexed(bytes32)

event AuthorizationCanceled:
    authorizer: indexed(address)
    nonce: indexed(bytes32)

event Pause: pass
event Unpause: pass

event Blacklisted:
    account: indexed(address)

event UnBlacklisted:
    account: indexed(address)

DOMAIN_TYPE: constant(bytes32) = keccak256(
    "EIP712Domain(string name,string version,uint256 chainId,address verifyingContract)"
)
PERMIT_TYPE: constant(bytes32) = keccak256(
    "Permit(address owner,address spender,uint256 value,uint256 nonce,uint256 deadline)"
)
TRANSFER_TYPE: constant(bytes32) = keccak256(
    "TransferWithAuthorization(address from,address to,uint256 value,uint256 validAfter,uint256 validBefore,bytes32 nonce)"
)
RECEIVE_TYPE: constant(bytes32) = keccak256(
    "ReceiveWithAuthorization(address from,address to,uint256 value,uint256 validAfter,uint256 validBefore,bytes32 nonce)"
)
CANCEL_TYPE: constant(bytes32) = keccak256(
    "CancelAuthorization(address authorizer,bytes32 nonce)"
)
LARGEST_S: constant(uint256) = (
    57896044618658097711785492504343953926418782139537452191302581570759080747168
)
VALID: constant(bytes32) = (
    0x1626ba7e00000000000000000000000000000000000000000000000000000000
)
symbol: public(constant(String[4])) = "USDC"
version: public(constant(String[1])) = "2"
decimals: public(constant(uint8)) = 6

name: public(String[32])
owner: public(address)
paused: public(bool)
totalSupply: public(uint256)
balanceOf: public(HashMap[address, uint256])
allowance: public(HashMap[address, HashMap[address, uint256]])
nonces: public(HashMap[address, uint256])
isBlacklisted: public(HashMap[address, bool])
_used: HashMap[address, HashMap[bytes32, bool]]


@deploy
def __init__(name: String[32]):
    self.name = name
    self.owner = msg.sender


# --- the operator's adapter


@external
def mint(to: address, amount: uint256):
    self._only_owner()
    self.totalSupply += amount
    self.balanceOf[to] += amount
    log Transfer(sender=empty(address), receiver=to, value=amount)


@external
def pause():
    self._only_owner()
    self.paused = True
    log Pause()


@external
def unpause():
    self._only_owner()
    self.paused = False
    log Unpause()


@external
def blacklist(account: address):
    self._only_owner()
    self.isBlacklisted[account] = True
    log Blacklisted(account=account)


@external
def unBlacklist(account: address):
    self._only_owner()
    self.isBlacklisted[account] = False
    log UnBlacklisted(account=account)


# --- ERC-20


@external
def transfer(to: address, amount: uint256) -> bool:
    self._not_blacklisted(msg.sender)
    self._transfer(msg.sender, to, amount)
    return True


@external
def approve(spender: address, amount: uint256) -> bool:
    self._not_blacklisted(msg.sender)
    self._approve(msg.sender, spender, amount)
    return True


@external
def transferFrom(source: address, to: address, amount: uint256) -> bool:
    self._not_blacklisted(msg.sender)
    assert amount <= self.allowance[source][msg.sender], "ERC20: transfer amount exceeds allowance"
    self.allowance[source][msg.sender] -= amount
    self._transfer(source, to, amount)
    return True


# --- EIP-2612


@external
@view
def DOMAIN_SEPARATOR() -> bytes32:
    return self._domain_separator()


@external
def permit(
    owner: address, spender: address, amount: uint256, deadline: uint256,
    v: uint8, r: bytes32, s: bytes32,
):
    self._permit(owner, spender, amount, deadline, self._packed(v, r, s))


@internal
def _permit(
    owner: address, spender: address, amount: uint256, deadline: uint256, signature: Bytes[128]
):
    assert deadline >= block.timestamp, "FiatTokenV2: permit is expired"
    nonce: uint256 = self.nonces[owner]
    self.nonces[owner] = nonce + 1
    self._check(
        owner,
        keccak256(abi_encode(PERMIT_TYPE, owner, spender, amount, nonce, deadline)),
        signature,
    )
    self._approve(owner, spender, amount)


# --- EIP-3009


@external
@view
def authorizationState(authorizer: address, nonce: bytes32) -> bool:
    return self._used[authorizer][nonce]


@external
def transferWithAuthorization(
    source: address, to: address, amount: uint256, validAfter: uint256, validBefore: uint256,
    nonce: bytes32, v: uint8, r: bytes32, s: bytes32,
):
    self._use(
        TRANSFER_TYPE, source, to, amount, validAfter, validBefore, nonce, self._packed(v, r, s)
    )


@external
def receiveWithAuthorization(
    source: address, to: address, amount: uint256, validAfter: uint256, validBefore: uint256,
    nonce: bytes32, v: uint8, r: bytes32, s: bytes32,
):
    assert to == msg.sender, "FiatTokenV2: caller must be the payee"
    self._use(
        RECEIVE_TYPE, source, to, amount, validAfter, validBefore, nonce, self._packed(v, r, s)
    )


@external
def cancelAuthorization(
    authorizer: address, nonce: bytes32, v: uint8, r: bytes32, s: bytes32
):
    assert not self._used[authorizer][nonce], "FiatTokenV2: authorization is used or canceled"
    self._check(authorizer, keccak256(abi_encode(CANCEL_TYPE, authorizer, nonce)), self._packed(v, r, s))
    self._used[authorizer][nonce] = True
    log AuthorizationCanceled(authorizer=authorizer, nonce=nonce)


# --- the forms that take a signature as bytes (FiatToken 2.2). Vyper has no overloading, so they
# are told apart here, and it takes call data of fixed lengths only: signatures have 65 or 97 bytes.


@external
def __default__():
    called: bytes4 = convert(slice(msg.data, 0, 4), bytes4)
    if called == method_id("permit(address,address,uint256,uint256,bytes)", output_type=bytes4):
        self._permit_bytes(slice(msg.data, 4, 288))
        return
    params: Bytes[384] = b""
    if len(msg.data) == 356:
        params = slice(msg.data, 4, 352)
    else:
        params = slice(msg.data, 4, 384)
    if called == method_id(
        "transferWithAuthorization(address,address,uint256,uint256,uint256,bytes32,bytes)",
        output_type=bytes4,
    ):
        self._use_bytes(TRANSFER_TYPE, params)
    elif called == method_id(
        "receiveWithAuthorization(address,address,uint256,uint256,uint256,bytes32,bytes)",
        output_type=bytes4,
    ):
        self._use_bytes(RECEIVE_TYPE, params)
    else:
        raise "FiatTokenV2: no such function"


@internal
def _permit_bytes(params: Bytes[288]):
    owner: address = empty(address)
    spender: address = empty(address)
    amount: uint256 = 0
    deadline: uint256 = 0
    signature: Bytes[65] = b""
    owner, spender, amount, deadline, signature = abi_decode(
        params, (address, address, uint256, uint256, Bytes[65])
    )
    self._permit(owner, spender, amount, deadline, signature)


@internal
def _use_bytes(kind: bytes32, params: Bytes[384]):
    source: address = empty(address)
    to: address = empty(address)
    amount: uint256 = 0
    valid_after: uint256 = 0
    valid_before: uint256 = 0
    nonce: bytes32 = empty(bytes32)
    signature: Bytes[128] = b""
    source, to, amount, valid_after, valid_before, nonce, signature = abi_decode(
        params, (address, address, uint256, uint256, uint256, bytes32, Bytes[128])
    )
    assert kind != RECEIVE_TYPE or to == msg.sender, "FiatTokenV2: caller must be the payee"
    self._use(kind, source, to, amount, valid_after, valid_before, nonce, signature)


@internal
@pure
def _packed(v: uint8, r: bytes32, s: bytes32) -> Bytes[65]:
    return concat(r, s, slice(convert(v, bytes32), 31, 1))


# --- within


@internal
def _use(
    kind: bytes32, source: address, to: address, amount: uint256, valid_after: uint256,
    valid_before: uint256, nonce: bytes32, signature: Bytes[128],
):
    assert block.timestamp > valid_after, "FiatTokenV2: authorization is not yet valid"
    assert block.timestamp < valid_before, "FiatTokenV2: authorization is expired"
    assert not self._used[source][nonce], "FiatTokenV2: authorization is used or canceled"
    self._check(
        source,
        keccak256(abi_encode(kind, source, to, amount, valid_after, valid_before, nonce)),
        signature,
    )
    self._used[source][nonce] = True
    log AuthorizationUsed(authorizer=source, nonce=nonce)
    self._transfer(source, to, amount)


@internal
def _transfer(source: address, to: address, amount: uint256):
    self._not_paused()
    self._not_blacklisted(source)
    self._not_blacklisted(to)
    assert to != empty(address), "ERC20: transfer to the zero address"
    assert amount <= self.balanceOf[source], "ERC20: transfer amount exceeds balance"
    self.balanceOf[source] -= amount
    self.balanceOf[to] += amount
    log Transfer(sender=source, receiver=to, value=amount)


@internal
def _approve(owner: address, spender: address, amount: uint256):
    self._not_paused()
    self._not_blacklisted(owner)
    self._not_blacklisted(spender)
    self.allowance[owner][spender] = amount
    log Approval(owner=owner, spender=spender, value=amount)


@internal
@view
def _check(signer: address, struct_hash: bytes32, signature: Bytes[128]):
    digest: bytes32 = keccak256(concat(b"\x19\x01", self._domain_separator(), struct_hash))
    if signer.is_contract:
        ok: bool = False
        answer: Bytes[32] = b""
        ok, answer = raw_call(
            signer,
            abi_encode(
                digest, signature, method_id=method_id("isValidSignature(bytes32,bytes)")
            ),
            max_outsize=32, is_static_call=True, revert_on_failure=False,
        )
        assert ok and len(answer) == 32, "FiatTokenV2: invalid signature"
        assert convert(answer, bytes32) == VALID, "FiatTokenV2: invalid signature"
        return
    assert len(signature) == 65, "ECRecover: invalid signature length"
    v: uint8 = convert(convert(slice(signature, 64, 1), bytes1), uint8)
    r: bytes32 = convert(slice(signature, 0, 32), bytes32)
    s: bytes32 = convert(slice(signature, 32, 32), bytes32)
    assert convert(s, uint256) <= LARGEST_S, "ECRecover: invalid signature 's' amount"
    found: address = ecrecover(digest, v, r, s)
    assert found != empty(address) and found == signer, "FiatTokenV2: invalid signature"


@internal
@view
def _domain_separator() -> bytes32:
    return keccak256(
        abi_encode(
            DOMAIN_TYPE, keccak256(self.name), keccak256(version), chain.id, self
        )
    )


@internal
@view
def _only_owner():
    assert msg.sender == self.owner, "Ownable: caller is not the owner"


@internal
@view
def _not_paused():
    assert not self.paused, "Pausable: paused"


@internal
@view
def _not_blacklisted(account: address):
    assert not self.isBlacklisted[account], "Blacklistable: account is blacklisted"

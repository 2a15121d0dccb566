# pragma version ~=0.4.3
# pragma evm-version paris
"""
A contract wallet with ERC-1271, for tests. A signature is its owner's address as a word, then the
owner's 65 bytes. One that nobody owns burns all the gas that it gets.
"""

MAGIC: constant(bytes4) = 0x1626ba7e

owner: public(address)


@deploy
def __init__(owner: address):
    self.owner = owner


@external
@view
def isValidSignature(digest: bytes32, signature: Bytes[128]) -> bytes4:
    assert self.owner != empty(address), UNREACHABLE
    if len(signature) != 97:
        return 0xffffffff
    named: address = convert(convert(slice(signature, 0, 32), uint256), address)
    v: uint8 = convert(convert(slice(signature, 96, 1), bytes1), uint8)
    r: bytes32 = convert(slice(signature, 32, 32), bytes32)
    s: bytes32 = convert(slice(signature, 64, 32), bytes32)
    if named == self.owner and ecrecover(digest, v, r, s) == self.owner:
        return MAGIC
    return 0xffffffff

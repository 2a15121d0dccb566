# pragma version ~=0.4.3
# pragma evm-version paris
"""
What an OP-stack chain has as its predeploy GasPriceOracle, for tests: a price for each byte of a
transaction and of the signature that it will have. Not the real one's: that compresses, and
follows the L1.
"""

SIGNATURE_BYTES: constant(uint256) = 68

# Tests write it into its slot, which is 1. Without a price nothing is told.
wei_per_byte: uint256

@external
@view
def getL1Fee(transaction: Bytes[65536]) -> uint256:
    assert self.wei_per_byte > 0, "no price"
    assert slice(transaction, 0, 1) == b"\x02", "not an unsigned transaction of type 2"
    return (len(transaction) + SIGNATURE_BYTES) * self.wei_per_byte

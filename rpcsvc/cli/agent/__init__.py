"""The commands of an agent: operations, the demo, and checks of signatures and receipts."""

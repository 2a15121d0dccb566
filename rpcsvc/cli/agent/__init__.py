"""The commands of an agent: operations, the demo, and checking what the service signed."""

"""Stand-ins, stacks and builders that several test modules share."""

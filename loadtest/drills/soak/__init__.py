"""make drill SOAK=30: many clients for that many minutes, and proof that nothing in the stack grows meanwhile."""

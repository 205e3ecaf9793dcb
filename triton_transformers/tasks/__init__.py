"""What systems do, as every process may know it."""

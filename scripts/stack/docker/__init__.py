"""The stack under Docker: compose.yaml with the settings filled in, and what it needs checked beforehand."""

"""Compare the pinned packages and images with known vulnerabilities."""

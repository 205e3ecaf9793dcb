"""What the backends of this folder share. Each backend's model.py puts this folder's parent on sys.path."""

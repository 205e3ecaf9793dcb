"""The stack without Docker: the same programs as plain processes under supervisord, all of it under LOCAL_STATE."""

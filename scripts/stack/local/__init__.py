"""The runtime without Docker: processes under supervisord. Everything they write lies under LOCAL_STATE."""

"""Deploy the model repository as a managed deployment of Oracle Cloud's Data Science service."""

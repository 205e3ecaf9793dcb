"""What several APIs do with texts and images on their way to the models."""

"""Export encoders of texts, with the step that turns their outputs into answers."""

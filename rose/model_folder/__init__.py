"""A model folder in Hugging Face format, known from its config and the headers of its weight files alone."""

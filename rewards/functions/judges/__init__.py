"""Language models as judges, at any URL with the OpenAI protocol."""

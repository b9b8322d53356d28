"""Images of prompts."""

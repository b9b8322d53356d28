"""Images: files and parts of messages to pixels, and pixels to what a model reads."""

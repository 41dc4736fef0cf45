"""Generated from engram.proto by proto/generate.py. Not for editing."""

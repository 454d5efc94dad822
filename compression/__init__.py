"""Codecs: flat fp32 vectors to bytes and back."""

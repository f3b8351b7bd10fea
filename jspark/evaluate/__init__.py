"""Measuring drafters: how long their drafts survive, how honest their confidence is, what that is worth."""

"""The six stages and what they are made of. See docs/design.md."""

"""One module a family, each with a `FAMILY`; docs/legacy.md says what goes into one."""

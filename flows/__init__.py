"""What runs when: the Prefect flow, its deployment and the `elastane` command."""

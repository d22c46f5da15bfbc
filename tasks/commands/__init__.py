"""What users do beside the pipeline, one command a file."""

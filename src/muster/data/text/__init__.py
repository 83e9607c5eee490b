"""What tokenizers are made of: chat templates, small vocabularies."""

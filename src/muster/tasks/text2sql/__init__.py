"""Text-to-SQL: generated databases, questions and gold queries, and scoring by running what a model writes."""

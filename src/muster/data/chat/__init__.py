"""Chats: rows put in order, rendered by the model's template, masked so that training shows what serving asks."""

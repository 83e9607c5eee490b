"""What commands draw: pictures and tables that know nothing of commands."""

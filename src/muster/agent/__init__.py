"""One per host: starts the ranks, watches them, holds their snapshots, obeys the supervisor. No torch."""

"""Google's REST services, for every back end there: one request, credentials, retries."""

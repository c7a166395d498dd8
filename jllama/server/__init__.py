"""A server that speaks OpenAI's protocol: JSON in, JSON or a stream of events out, one engine behind it."""

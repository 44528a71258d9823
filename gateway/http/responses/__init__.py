"""OpenAI's Responses API: bodies of requests, and answers."""

"""LLM servers behind the OpenAI-compatible API."""

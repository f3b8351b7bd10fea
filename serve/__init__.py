"""An OpenAI-compatible HTTP server beside the engine: HTTP and JSON here, text and tokens in jspark."""

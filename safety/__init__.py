"""Safety: verdicts over text, tokens and scores. It knows neither sockets nor models of ours."""

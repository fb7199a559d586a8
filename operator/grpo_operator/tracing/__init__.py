"""One trace per attempt: its spans, and these as OTLP. Pure: looks come in, spans go out."""

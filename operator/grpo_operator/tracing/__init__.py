"""One trace per attempt: what is known of it as spans, and these as OTLP. Pure: looks come in,
spans go out."""

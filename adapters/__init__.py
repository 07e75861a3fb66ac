"""Engine adapters, one folder an engine. Only an adapter imports its engine."""

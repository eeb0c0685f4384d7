"""Wire formats: messages between services, answer streams and the Open Inference Protocol. No I/O."""

"""What stands on the wire: messages between services, answer streams, the Open Inference Protocol. No I/O."""

"""The event log: the run's folder, the writer, the reader, and which values a reader accepts."""

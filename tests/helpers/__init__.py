"""What tests share: tiny targets and drafters, stand-ins, and reference implementations."""

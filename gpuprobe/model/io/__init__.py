"""Documents and files: headers, the validating decoder, the atomic write."""

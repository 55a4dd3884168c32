"""Questions of customers to tools, as JSON that satisfies a schema."""

"""What tests of several rooms share: tiny data, finished runs, servers and clusters. No tests are in here."""

"""The ops page: what all services of this user do now, and did, in a browser. It reads and changes nothing."""

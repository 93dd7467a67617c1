"""What all live services of this user say, once a second, as bounded series in memory."""

"""Many ranks: steps read in columns, packed recordings, dumps of the Flight Recorder."""

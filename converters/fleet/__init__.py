"""Many logs as one data set of Parquet files, and SQL queries about it."""

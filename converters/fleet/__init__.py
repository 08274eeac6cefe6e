"""Many logs as one data set of Parquet files, and questions about it in SQL."""

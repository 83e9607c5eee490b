from fakes.gcs import main

main()
